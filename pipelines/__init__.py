"""The commands: each parses, calls and reports. Run one by its path, or as `tokenyard VERB`."""
