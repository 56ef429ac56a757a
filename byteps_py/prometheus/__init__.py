"""The metrics page of a process, in the text format of Prometheus: what there is, from where, and over HTTP."""
