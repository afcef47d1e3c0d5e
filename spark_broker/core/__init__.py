"""Pure state machines of one partition: events and the time go in, effects come out. No I/O, clock or threads."""
