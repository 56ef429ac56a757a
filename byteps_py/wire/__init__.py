"""The messages of each link, one file for each: typed records and their encoding."""
