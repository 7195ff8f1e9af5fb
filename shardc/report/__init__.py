"""Reports on a compiled model: dumps, explanations, and costs as functions of sizes."""
