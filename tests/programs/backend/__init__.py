"""Features of torch on the backend "byteps", run in a job of several ranks; see __main__."""
