# The station's targets; the Makefile includes this file.

.PHONY: up down shell ssh ssh-command logs url rotate status rebuild clean-station clean-cache engine base sbom audit test-image
up: ## start the station: JupyterLab on 8888, ssh on 2222 (GPUS=none, all, 2 or 0,1)
down: ## save the runs and remove the container; keep runs, home folder and host keys
shell: ## open a shell inside (ARGS=--noprofile: without reading the home folder's profile)
ssh: ## log in over ssh (ARGS="train ls": run that command inside)
ssh-command: ## print the ssh command as one line, to paste or to script
logs: ## print the log of the services (ARGS=-f follows)
url: ## print the address for a browser, with its token
rotate: ## when someone leaves: make new token and keys, end all processes inside; saves the runs and resumes them
status: ## show name, image, ports, health and runs
rebuild: ## build the image again and start the station
clean-station: ## remove container, volumes and images; keep runs and data
clean-cache: ## remove what builds of images have left in this engine, of all projects; the next build starts anew

# ARGS of these four is for a program inside. It reaches the script as typed: neither make nor a shell here expands it.
unexport ARGS
shell ssh logs rebuild: export STATION_ARGS := $(value ARGS)
up down rotate rebuild clean-station clean-cache:
	@scripts/station.sh $@
# 141: the reader of a pipe has read enough (make status | head).
shell ssh ssh-command logs url status:
	@scripts/station.sh $@ || [ $$? = 141 ]

engine: ## install and start a Docker engine (Debian, Ubuntu; as root)
base: ## build the base image from Debian's archive, if no image registry answers
engine base:
	@scripts/$@.sh

sbom: ## write build/sbom.json: the packages of the image, as CycloneDX
audit: ## ask Debian which packages of the image have security updates
sbom audit:
	@scripts/sbom.sh $@

test-image: setup ## build the image and test the running station with a real engine; some only: IN=tests/image/test_ssh.py
	@scripts/test-image.sh $(or $(IN),tests/image) $(ARGS)
