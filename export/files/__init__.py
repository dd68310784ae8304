"""Lines of standard input and of files of any length. Outputs appear whole or not at all, so that a
run which was killed resumes."""
