"""Topics as DataFrames: the Python Data Source behind `format("spark_broker")`."""
