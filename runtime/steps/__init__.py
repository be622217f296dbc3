"""Steps as the host makes them: rows, their packed inputs, and the choice of sizes."""
