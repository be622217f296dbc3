"""What is known of each operator of NPUs: one record an operator, in the file of its group."""
