"""What people see: tables of studies, audits and benchmarks, and progress. Nothing else imports this package but the CLI."""
