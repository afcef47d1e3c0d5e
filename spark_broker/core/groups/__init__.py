"""Consumer groups (KIP-848): the server assigns partitions, and members converge one by one. Pure."""
