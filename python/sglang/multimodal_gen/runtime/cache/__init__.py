"""What is kept from one call of a denoiser for the next."""
