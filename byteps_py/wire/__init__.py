"""What travels on each link, one file for each: typed records and their encoding."""
