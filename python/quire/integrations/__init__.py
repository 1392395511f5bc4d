"""quire in other libraries (docs/integrations.md). Each module imports its library when it is called, not before, and
says what to install if it is missing."""
