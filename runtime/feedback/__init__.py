"""What is kept from step to step for codes with feedback: what they left out, and the momentum that they stand for."""
