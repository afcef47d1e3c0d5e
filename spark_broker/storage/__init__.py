"""The only code that opens log files."""
