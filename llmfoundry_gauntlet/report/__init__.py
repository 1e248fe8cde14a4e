"""Tables from the records of runs."""
