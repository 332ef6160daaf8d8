"""Tables of a run for BI tools: the dictionary of columns, rows, CSV and Parquet, the endpoint and the command."""
