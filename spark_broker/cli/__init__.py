"""The command line, `spark-broker`."""
