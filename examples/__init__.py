"""Programs and scripts that show what the project does; one folder for each project that users migrate from."""
