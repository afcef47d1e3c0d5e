"""A Spark Connect client that has PySpark and nothing of this project: writes, reads and streams a topic."""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession


def main() -> None:
    """Arguments: the Connect server's port, our brokers, a directory that the server can write."""
    port, servers, directory = sys.argv[1:]
    spark = SparkSession.builder.remote(f"sc://127.0.0.1:{port}").getOrCreate()
    options = {"kafka.bootstrap.servers": servers}

    rows = spark.range(1000).selectExpr("id", "concat('name ', id) AS name")
    rows.write.format("spark_broker").options(**options, topic="typed", createTopic="true").mode("append").save()
    read = spark.read.format("spark_broker").options(**options, subscribe="typed").load()
    totals = read.selectExpr("count(*)", "sum(id)", "max(name)", "count(DISTINCT _offset, _partition)").collect()[0]

    stream = spark.readStream.format("spark_broker").options(**options, subscribe="typed", startingOffsets="earliest")
    query = (
        stream.load()
        .select("id", "name")
        .writeStream.format("spark_broker")
        .options(**options, topic="copy", createTopic="true", checkpointLocation=f"{directory}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    copied = spark.read.format("spark_broker").options(**options, subscribe="copy").load()
    refusal = ""
    try:
        spark.read.format("spark_broker").options(**options, subscribe="nothing").load().collect()
    except Exception as error:  # noqa: BLE001 - it is what a user sees
        refusal = str(error)
    result = {
        "read": list(totals),
        "copied": copied.selectExpr("count(*)", "sum(id)").collect()[0][:],
        "refusal": refusal,
        "imported": sorted(name for name in sys.modules if name.startswith(("spark_broker", "pyspark_spark_broker"))),
    }
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
