"""The files of a run, external answers, tables and reports."""
