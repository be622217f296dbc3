"""What stands in for CANN on a machine without it, so that torchair converts graphs anywhere."""
