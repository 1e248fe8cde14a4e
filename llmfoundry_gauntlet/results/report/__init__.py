"""Tables, comparisons and the report page."""
