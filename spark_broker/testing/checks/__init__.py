"""The history checker's checks: one idea a file, each a function from facts to violations."""
