"""Golden vectors: bytes on which independent implementations agree, and how a device's compare with them."""
