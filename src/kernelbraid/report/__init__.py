"""What people see: tables, progress, errors. Only the command line imports this package."""
