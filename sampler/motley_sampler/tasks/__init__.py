"""Tasks in Harbor's folder format: loading, grading in a fresh sandbox, and the audit that proves them sound."""
