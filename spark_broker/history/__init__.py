"""History: what is sealed of a topic, in a Delta table that every tool of the lakehouse reads."""
