"""Seeds of random streams."""


def signed64(value: int, name: str) -> int:
    """The signed integer of the same 64 bits; operators take no others. Raises ValueError out of range."""
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{name} must fit into 64 bits, -2**63 <= {name} < 2**64; got {value}")
    return value - 2**64 if value >= 2**63 else value
