"""The command line: `offloadzero bench`, `plan`, `doctor` and `report`."""
