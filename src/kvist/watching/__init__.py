"""The daemon as people see it: samples over time, and figures worked out of them. For the command line and for HTTP."""
