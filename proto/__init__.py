"""The control plane's schema (control.proto) and the code generated from it (``make proto``)."""
