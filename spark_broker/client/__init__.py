"""Producer, Consumer and Admin. They need pyarrow and msgspec, and neither Spark nor a JVM."""
