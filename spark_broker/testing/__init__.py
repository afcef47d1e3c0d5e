"""Tools to test a cluster, or an application on one: record what clients saw, inject faults, check what is left."""
