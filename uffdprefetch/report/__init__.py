"""What a run leaves behind for people and programs: summary lines and files."""
