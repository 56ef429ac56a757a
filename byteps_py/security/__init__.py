"""Keys and certificates that are derived from the job's secret, and limits for callers that have not authenticated."""
