"""`offloadzero demo`. Its model and its configuration are also those of `examples/`, where links lead here."""
