"""Pure decisions of the controller: events and the time go in, metadata records and effects come out.

Nothing here reads a clock, a file, a socket or a random number; `spark_broker.driver` is the shell that carries the
effects out.
"""
