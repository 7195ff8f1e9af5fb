"""State of codes with error feedback, kept from step to step: their residuals, and the momentum that they encode."""
