"""Results of tasks for people and programs: the table, the file, the progress line."""
