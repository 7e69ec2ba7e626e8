"""One home for what the package uses of other libraries beyond their documented interfaces."""
