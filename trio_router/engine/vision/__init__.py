"""The reference worker's media: fetched, measured, put into prompts, and told to decode workers. No pixel is ever
looked at by a model: what a picture is to this engine is the digest of its bytes.
"""
