"""The daemon for browsers, scrapers and scripts: a process of its own that asks the daemon over its socket."""
