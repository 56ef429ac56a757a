"""What is derived from the job's secret, and limits for strangers."""
