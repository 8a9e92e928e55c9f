"""The profiles: each has servers of its own and faults that meet a part of the kernel only partly."""
