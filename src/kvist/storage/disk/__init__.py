"""The tier on local disks: what `docs/disk-format.md` describes, and how it is kept."""
