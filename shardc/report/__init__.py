"""What people look at: dumps, explanations, and costs as functions of sizes."""
