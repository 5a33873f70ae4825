"""The update of the records, wherever their states live: optimizer specs, layouts, the pipeline."""
