# vLLM with kvist's connector: docker build --file deploy/docker/vllm.Dockerfile --tag vllm-kvist:0.32.0 .
FROM vllm/vllm-openai:v0.32.0
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN python3 -m pip install --no-cache-dir '/source[cuda]'
