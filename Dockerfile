# Serves the model in /opt/ml/model, or the one of the Hub that MODEL names, at port 8080.
FROM python:3.12-slim
RUN useradd --create-home hydra
WORKDIR /home/hydra/package
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml setup.py setup.cfg README.md LICENSE MANIFEST.in ./
COPY hydra_transformers hydra_transformers
RUN pip install --no-cache-dir ".[serve]"
USER hydra
WORKDIR /home/hydra
ENV MODEL=/opt/ml/model
EXPOSE 8080
# The word that managed services add to the command, "serve", becomes the shell's $0.
ENTRYPOINT ["sh", "-c", "exec hydra-transformers serve \"$MODEL\" --host 0.0.0.0 --port 8080"]
