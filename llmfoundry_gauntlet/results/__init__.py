"""Read and write the files of a run, score external generations, and render tables and reports."""
