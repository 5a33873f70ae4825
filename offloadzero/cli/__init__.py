"""The command line: `offloadzero bench nvme | copy` (floor 7)."""
