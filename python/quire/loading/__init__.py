"""What happens when quire is imported: its libraries are loaded, and PyTorch's transforms learn its operators."""
