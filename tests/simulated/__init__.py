"""A device that behaves like one, on the CPU: what is launched runs later, in the order of its stream."""
